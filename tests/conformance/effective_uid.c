// The program of the image "nonewprivs": a file that gives its owner's rights prints whose rights it has.
#include <stdio.h>
#include <unistd.h>

int main(void) {
    printf("Effective uid: %d\n", (int)geteuid());
    return 0;
}
