// Functions of other packages are declared without bodies, which the compiler permits beside this file.
