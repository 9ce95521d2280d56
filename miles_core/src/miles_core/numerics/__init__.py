"""Batch-invariant operators, shared by engine and trainer: the kernels behind `precision.true_on_policy`.

`profiles` says for which models they are proven, and what the two sides agree on; it imports nothing heavy. `patch`
puts the operators into a Hugging Face model. Import the modules themselves.
"""
