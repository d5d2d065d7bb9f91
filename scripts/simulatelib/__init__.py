"""scripts/simulate."""
