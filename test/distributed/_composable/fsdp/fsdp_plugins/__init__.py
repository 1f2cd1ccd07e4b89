"""What plugins and trainers outside of torch do with sharded models."""
