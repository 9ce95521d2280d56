"""Conformance kits and test doubles for plugin authors."""
