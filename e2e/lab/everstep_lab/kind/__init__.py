"""The lab on kind: real kubelets and containers, simulated GPUs. `client.KindLab` is its interface."""
