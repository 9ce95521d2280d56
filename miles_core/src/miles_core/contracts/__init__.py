"""The four contracts: each a pure check over a batch."""
