"""The compiled part of the engine, on CPUs: C++ kernels (`kernels`), oneDNN products (`products`), and the line that
identifies an engine's arithmetic (`numerics`)."""
