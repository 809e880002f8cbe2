"""What ours costs beside the frameworks' own layers and a copy of the same bytes: ``rmsnorm bench``."""
