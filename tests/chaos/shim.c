/* Preloaded into the processes of a stack: a wall clock that is off and a disk that is slow, by what a file says.

   The file is $CHAOS_CONTROL/NAME, NAME being the last word of the command line without its directory and ending: a
   service's configuration. Without it nothing is changed. The monotonic clock always goes on, as when a clock is set. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

/* As shim.py has it. */
struct control {
    int64_t clock_off_ns;
    int64_t disk_delay_ns;
    int64_t clock_asked;
    int64_t disk_delayed;
};

static struct control *volatile control;

__attribute__((constructor)) static void begin(void)
{
    const char *folder = getenv("CHAOS_CONTROL");
    char words[8192], path[PATH_MAX];
    int file = folder ? open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC) : -1;
    ssize_t size = file < 0 ? 0 : syscall(SYS_read, file, words, sizeof words - 1);
    if (file >= 0)
        close(file);
    if (size <= 1)
        return;
    words[size] = 0;
    char *name = words + size - 1;
    while (name > words && name[-1] && name[-1] != '/')
        name--;
    char *ending = strrchr(name, '.');
    if (ending)
        *ending = 0;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return;
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        control = found;
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, which, now);
    if (!failed && control && control->clock_off_ns && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
        int64_t all = now->tv_sec * SECOND + now->tv_nsec + control->clock_off_ns;
        now->tv_sec = all / SECOND;
        now->tv_nsec = all % SECOND;
        __atomic_fetch_add(&control->clock_asked, 1, __ATOMIC_RELAXED);
    }
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now)
        *now = found.tv_sec;
    return found.tv_sec;
}

static void wait_for_disk(int file)
{
    struct stat about;
    int64_t delay = control ? control->disk_delay_ns : 0;
    if (!delay || fstat(file, &about) || !S_ISREG(about.st_mode))
        return;
    struct timespec pause = {delay / SECOND, delay % SECOND};
    __atomic_fetch_add(&control->disk_delayed, 1, __ATOMIC_RELAXED);
    nanosleep(&pause, NULL);
}

ssize_t read(int file, void *to, size_t size) { wait_for_disk(file); return syscall(SYS_read, file, to, size); }
ssize_t write(int file, const void *from, size_t size) { wait_for_disk(file); return syscall(SYS_write, file, from, size); }
ssize_t pread(int file, void *to, size_t size, off_t at) { wait_for_disk(file); return syscall(SYS_pread64, file, to, size, at); }
ssize_t pread64(int file, void *to, size_t size, off64_t at) { wait_for_disk(file); return syscall(SYS_pread64, file, to, size, at); }
ssize_t pwrite(int file, const void *from, size_t size, off_t at) { wait_for_disk(file); return syscall(SYS_pwrite64, file, from, size, at); }
ssize_t pwrite64(int file, const void *from, size_t size, off64_t at) { wait_for_disk(file); return syscall(SYS_pwrite64, file, from, size, at); }
int fsync(int file) { wait_for_disk(file); return (int)syscall(SYS_fsync, file); }
int fdatasync(int file) { wait_for_disk(file); return (int)syscall(SYS_fdatasync, file); }
