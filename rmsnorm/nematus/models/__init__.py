"""Nematus's cells and models, written once over a table of operations that each framework fills in."""
