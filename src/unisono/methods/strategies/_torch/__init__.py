"""Methods of torch's own, below the same unchanged program: "torch:ddp" and so on, to compare with."""
