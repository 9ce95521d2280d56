"""What token families are made of: a declarative base, reply parsers, spellings of tool calls, proofs."""
