"""From a profile and devices to a plan, in numpy alone: replay, exact search, policies, scores."""
