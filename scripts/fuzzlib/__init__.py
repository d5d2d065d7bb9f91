"""scripts/fuzz."""
