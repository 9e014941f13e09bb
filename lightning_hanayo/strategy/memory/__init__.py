"""What ranks hold in memory: predicted from the schedule, and measured."""
