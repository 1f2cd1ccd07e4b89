"""The wrong uses of ``fully_shard`` that are found."""
