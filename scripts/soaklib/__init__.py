"""What scripts/soak runs, samples and judges."""
