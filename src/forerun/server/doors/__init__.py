"""Other APIs in front of the same model: their requests become chats, and answers come in their shapes."""
