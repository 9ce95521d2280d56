"""Expert routes of MoE models: how they are stored, sent, recorded and replayed."""
