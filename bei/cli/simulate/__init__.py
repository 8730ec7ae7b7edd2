"""``bei simulate``: traces through schedulers on simulated devices whose steps take what a cost model predicts."""
