"""What blocks do to hold less memory."""
