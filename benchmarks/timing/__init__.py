"""What times candidates beside each other: their cells, the process of each backend, tables, plots and files."""
