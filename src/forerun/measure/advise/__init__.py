"""`forerun advise`: measures a user's prompts and recommends a drafter, with the command to run it."""
