"""The Ray Serve application in front: tokenizes, picks workers, streams, decides whether speculation pays."""
