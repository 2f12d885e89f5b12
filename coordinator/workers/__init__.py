"""Worker processes as a coordinator knows them: their records, connections, identities and silences."""
