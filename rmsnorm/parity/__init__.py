"""The kit that holds every implementation to the golden."""
