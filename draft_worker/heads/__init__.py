"""Draft heads on a draft worker: EAGLE-3, which reads states of the target."""
