"""The actor's house: the loop that fills slots, and the process around it. Never imports the learner's."""
