"""Placements of the draft: `devices` (prices, bandwidths), `prediction`, `report`, `measuring` (further profiles)."""
