"""Weight versions: buckets, digests, life cycle."""
