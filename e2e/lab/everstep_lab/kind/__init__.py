"""The lab on kind: real kubelets and containers, simulated GPUs. See `client.KindLab`."""
