"""The fixture ``rmsnorm_parity``: judge an implementation against the golden in a test of three lines."""
