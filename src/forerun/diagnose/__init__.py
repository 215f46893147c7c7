"""`forerun diagnose`: checks a drafter and a target on a user's prompts and says what is wrong."""
