"""What the tests share: ranks, models, the release beside the branch, a late device."""
