"""The policy: what an actor steps and the learner trains. No floor below it knows torch."""
