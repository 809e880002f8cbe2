"""How far two results are apart, in ulps and in units of their terms, and how far they may be."""
