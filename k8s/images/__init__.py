"""Images per role, their lock files, bills of materials and vulnerability audit."""
