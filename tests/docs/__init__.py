"""The documentation: it builds, its links lead somewhere, its generated pages are fresh, its commands are tested."""
