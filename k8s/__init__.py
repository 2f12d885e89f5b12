"""Deployment of Outrider: manifests and images. No serving process imports this package."""
