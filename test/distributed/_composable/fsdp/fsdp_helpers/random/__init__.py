"""Random models and schedules."""
