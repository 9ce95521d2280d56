"""Test support: what SGLang's published wheels need before they serve on a machine without an accelerator."""
