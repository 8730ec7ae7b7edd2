"""``bei simulate``: runs traces through schedulers on simulated devices, whose step times a cost model predicts."""
