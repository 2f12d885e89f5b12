"""How Outrider is deployed: manifests, and what makes the images. Nothing that serves imports this package."""
