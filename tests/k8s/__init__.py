"""Checks of the manifests and the image definitions that need no cluster."""
