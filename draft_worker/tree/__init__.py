"""Parts of a draft session's hint tree: its nodes, and the candidates for the next ones. Pure."""
