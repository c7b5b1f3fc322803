"""One step of the Trainer on a copy of the module, for profiles and forecasts."""
