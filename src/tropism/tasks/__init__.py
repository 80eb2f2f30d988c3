"""What earns reward: tasks that make prompts and judge answers."""
