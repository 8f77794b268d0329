/* flock(2) as a file system without locks answers it: below the folder of NO_FLOCK_FOLDER it fails with NO_FLOCK_ERRNO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int flock(int descriptor, int operation) {
    char link[64], path[4096];
    const char *folder = getenv("NO_FLOCK_FOLDER");
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path);
    if (length >= (ssize_t)strlen(folder) && !strncmp(path, folder, strlen(folder))) {
        errno = atoi(getenv("NO_FLOCK_ERRNO"));
        return -1;
    }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(descriptor, operation);
}
