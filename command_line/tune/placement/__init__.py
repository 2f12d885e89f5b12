"""Where the draft runs: `devices` (prices, bandwidths), `prediction`, `report`, `measuring` (further profiles)."""
