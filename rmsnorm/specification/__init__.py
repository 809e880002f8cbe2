"""What a call means: variants, dtypes, shapes, and the errors of what cannot be. No array library."""
