"""Images per role, their lock files, and what is said about these: bills of materials, advisories."""
