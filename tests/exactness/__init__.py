"""I2 under every sampling parameter: an independent reference, and all drafts compared with it."""
