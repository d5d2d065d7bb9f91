/* `nbdkit iserblk uri=URL`: nbdkit finds a plugin by its name only if it is a library. This one is
 * nbdkit's plugin for Python, which gets the script of iserblk before anything else. */

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static struct nbdkit_plugin plugin;
static int (*python_config) (const char *key, const char *value);
static int (*python_config_complete) (void);
static bool has_script;

static int
give_script (void)
{
  if (has_script)
    return 0;
  has_script = true;
  return python_config ("script", SCRIPT);
}

static int
config (const char *key, const char *value)
{
  return give_script () == -1 ? -1 : python_config (key, value);
}

static int
config_complete (void)
{
  return give_script () == -1 ? -1 : python_config_complete ();
}

struct nbdkit_plugin *
plugin_init (void)
{
  void *library = dlopen (PLUGINS "/nbdkit-python-plugin.so", RTLD_NOW | RTLD_GLOBAL);
  struct nbdkit_plugin *(*init) (void) = library ? dlsym (library, "plugin_init") : NULL;
  struct nbdkit_plugin *python = init ? init () : NULL;

  if (python == NULL) {
    fprintf (stderr, "nbdkit: iserblk: %s; install nbdkit-plugin-python\n", dlerror ());
    return NULL;
  }
  /* Both were made for the same release; if not, what the shorter one knows counts. */
  memcpy (&plugin, python,
          python->_struct_size < sizeof plugin ? python->_struct_size : sizeof plugin);
  plugin._struct_size = sizeof plugin;
  python_config = plugin.config;
  python_config_complete = plugin.config_complete;
  plugin.name = "iserblk";
  plugin.longname = "remote SCSI LUNs over iSER and iSCSI";
  plugin.description = NULL;
  plugin.config = config;
  plugin.config_complete = config_complete;
  plugin.config_help = "uri=URL  (required)  a LUN, or without /LUN all of a target; repeatable\n"
                       "NAME=VALUE           an option of iserblk-url(7)";
  plugin.magic_config_key = "uri";
  return &plugin;
}
