"""Where theory and practice meet, and the learner with them."""
