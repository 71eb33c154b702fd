"""The planner: where each part of the state is placed, and how long a step then takes."""
